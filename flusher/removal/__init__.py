"""What may be deleted from a node's directory: cuts past their retention, and what a crash left behind."""
