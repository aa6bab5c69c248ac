"""Turn drivers: how the turn goes from one ubatch to the next. One file each, the same contract (`base.py`)."""
