"""Messages between members: one class with its frame type each.

`control` has plans and steps, `link` liveness, rosters and the end of a link, `fetch` the parts of a
model, `ranks` the steps of a stage with several ranks, `claims` and `evidence` a member's proofs, and
`enrolment` the protocol of an invitation. `types` is the table from frame type to class. Open `control`
first.
"""
