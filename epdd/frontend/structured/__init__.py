"""What an answer has to look like: formats, tools and banned words as one grammar; tool calls."""
