"""What clients may send: the fields, their validation, and what becomes of each."""
