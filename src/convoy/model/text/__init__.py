"""Text of a model: tokeniser, chat templates in a child process, stop strings and control tokens."""
