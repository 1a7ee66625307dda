"""The pages of docs/reference, made from the code, and the plots of docs/img."""
