"""What an emulated program does to files happens in a folder of Maya's: it finds there what it saved, and nothing of the user's changes.

`files.py` switches it on and says what is left alone; `native/` does it, at the functions of the C library.
"""
