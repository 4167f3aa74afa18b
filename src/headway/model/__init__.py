"""Any Hugging Face causal language model over packed documents."""
