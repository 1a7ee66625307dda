"""Reads the machine; decides nothing.  Every reader takes a sysroot."""
