"""Megatron-core training, Hugging Face weights in and out, the streamed train step."""
