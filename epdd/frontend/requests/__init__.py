"""Request fields: definitions, validation, and whether each is honoured, refused or ignored."""
