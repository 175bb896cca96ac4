"""What readers of one collection see."""
