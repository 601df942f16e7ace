"""DeepSeek V4's compressed attention: its layer, its batch and its pools."""
