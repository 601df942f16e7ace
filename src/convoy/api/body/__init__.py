"""Turn a request's body on the wire into checked values, before anything costly is built from it.

`read_body` bounds bytes and time, `body_shape` bounds the number of JSON values, and `fields` refuses
fields that this server does not support, with `known_fields` as its table. `intake` limits the bodies that
are read at once and turns a prompt into tokens. Open `read_body` first.
"""
