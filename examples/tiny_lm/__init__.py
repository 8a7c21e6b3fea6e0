"""The parts of `train_tiny.py`: corpus, run plan, optimizer, training loop and measurement."""
