"""Groups of options that several verbs share, and their conversion to the values of other packages."""
