"""What lies in a model folder, looked at once and without torch, before any worker is started.

`look(folder)` reads the JSON files and the headers of the safetensors files, and returns a `Look`, or raises ModelError
with one sentence: which file, what is wrong, what to do.
"""

from epdd.checkpoint.look import Look, PromptFiles, look, prompt_files

__all__ = ["Look", "PromptFiles", "look", "prompt_files"]
