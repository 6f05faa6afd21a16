"""What `scripts/evaluate.py` measures: speed, exactness, acceptance, perplexity, batches."""
