"""What a program needs and sends, known before it runs, and before the devices it is for are there."""
