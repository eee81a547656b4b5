"""What can be known before anything runs: so far, compiling for hardware that is not there."""
