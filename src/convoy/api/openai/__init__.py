"""OpenAI's endpoints: parse a request, submit it to the engine, and build the response or the stream."""
