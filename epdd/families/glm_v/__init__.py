"""The GLM-V families: GLM-4.1V, GLM-4.6V and GLM-OCR; one file each, over what they share (`base.py`)."""
