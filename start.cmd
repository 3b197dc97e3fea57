@echo off
rem Sets up everything in .venv, once, and runs edgellm with the words that follow, as ./start does on Linux and macOS:
rem
rem   start.cmd chat "What is photosynthesis?"
rem
rem It needs Python 3.11 or newer; and Visual Studio's C++ tools where the prebuilt llama.cpp cannot be used.
setlocal
pushd "%~dp0"
py -3 -m tools.bootstrap run - || exit /b 1
popd
"%~dp0.venv\Scripts\edgellm.exe" %*
