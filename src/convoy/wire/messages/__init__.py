"""Messages between members: control, weights, ranks, evidence, enrolment, and the table of frame types."""
