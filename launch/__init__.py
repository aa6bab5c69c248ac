"""Processes, configuration and experiments: the command line over moe and dbo."""
