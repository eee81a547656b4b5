"""What can be known before anything runs: plans with their time and memory, and steps compiled for absent hardware."""
