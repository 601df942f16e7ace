"""Models on the Hugging Face hub: download files, stream byte ranges, and list the cache."""
