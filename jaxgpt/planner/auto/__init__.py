"""The layout of any function, chosen by an integer program: rules of its equations, the program, its running."""
