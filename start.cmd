@echo off
rem Sets up everything in .venv, once, and runs edgellm with the words that follow, as ./start does on Linux and macOS:
rem
rem   start.cmd chat "where is my mug?"
rem
rem It needs Python 3.11 or newer, and Visual Studio's C++ tools, by which llama.cpp is compiled for the processor.
setlocal
py -3 "%~dp0tools\bootstrap.py" run - || exit /b 1
"%~dp0.venv\Scripts\edgellm.exe" %*
