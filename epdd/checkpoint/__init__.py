"""Reads a model folder once, without torch, before any worker starts.

`look(folder)` reads the JSON files and the headers of the safetensors files and returns a `Look`.  If epdd cannot serve
the folder, it raises ModelError with one sentence: the file, what is wrong, what to do.
"""

from epdd.checkpoint.look import Look, PromptFiles, look, prompt_files

__all__ = ["Look", "PromptFiles", "look", "prompt_files"]
