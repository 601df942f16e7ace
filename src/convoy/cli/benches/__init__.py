"""The verbs below `convoy bench`: their flags, and how their results are printed."""
