"""What a compiled program runs and sends, read off its text."""
