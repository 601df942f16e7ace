"""Machine code for what a decode step does slowly in torch, compiled here where there is a C compiler."""
