"""What every run keeps: its directory, checkpoints, records, metrics and logs; it knows no kind of run."""
