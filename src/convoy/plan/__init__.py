"""Plan how a model is split over members: pure functions, in integers but for rates; no torch, no sockets.

`spec` reads config.json, `memory` fits stages into members, `placement` assigns layers to members, and
`rates` predicts tokens per second. `Span` is the text form of a member's layers, `MemberOffer` the
resources of one member, and `report` shows a placement as numbers. Open `placement` first.
"""
