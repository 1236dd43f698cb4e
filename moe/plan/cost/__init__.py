"""What a layout costs: bytes and seconds, predicted."""
