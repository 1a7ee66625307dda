"""The Qwen-VL families: Qwen2-VL, Qwen2.5-VL, Qwen3-VL; one file each, over what they share (`base.py`)."""
