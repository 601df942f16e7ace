"""One language model across several machines, over links that are always sealed.

Rooms from the ground floor up: `errors`, `crypto`, `wire`, `transport`, `trust`, `plan`, `model`,
`engine`, `cluster`, `api`, `fleet`, `bench` and `evaluate`, `config`, `cli`. A room imports itself and the
rooms before it. Open ARCHITECTURE.md first, and then `engine`.
"""

__version__ = "0.1.0"
