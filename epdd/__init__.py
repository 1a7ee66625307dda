"""epdd: one machine as a vision-language model server, with vision encoding on its CPUs and GPUs."""

__version__ = "0.1.0"
