"""What wants a GPU to be proved, part by part."""
