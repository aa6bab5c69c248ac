"""The mixture-of-experts layer, its transports and real models, written once and run whole or as ubatches."""
