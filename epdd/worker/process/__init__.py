"""A worker as a process: its loop, what it is bound to, what it reads ahead."""
