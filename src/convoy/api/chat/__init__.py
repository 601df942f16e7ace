"""Run one turn of the assistant for every API: chat completions, Messages and Responses.

An API translates its body into a `ChatRequest` (`request`), and builds its events from the pieces that a
`ReplyReader` (`reply`) makes of the engine's outputs. `generate` submits the engine's requests (`parsed`) of
every endpoint and writes the answer that a `ResponseBuilder` (`usage`) makes. Open `request` first.
"""
