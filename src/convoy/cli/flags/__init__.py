"""Groups of options that several verbs share, each with the conversion to the values that the rooms take."""
