"""The page of text from which the rehearsal tokenizer learns its merges."""

from __future__ import annotations

TEXT = """
hello hello hello hello hello hello hello hello hello hello hello hello hello hello hello hello
What is the sum of two numbers? What is the product? Reply with the integer only. Reply with one
word only. Answer the question in one short sentence. What is the capital of this country?
The user asks and the assistant answers. The assistant may call a tool; the tool gives a result,
and the result is read before the answer is written. Think about the question, then answer it.

You can call a function by its name with parameters. Each parameter has a name and a value; a
string is written as it is, any other type in JSON: numbers, booleans, arrays and objects. Set
string to true or to false. The function must exist and its parameters must follow the schema.

{"name": "get_weather", "description": "Get the weather of a city", "parameters": {"type": "object",
"properties": {"city": {"type": "string", "description": "Name of the city"}, "days": {"type":
"integer"}}, "required": ["city"]}}
{"name": "search", "description": "Search the web for a text", "parameters": {"type": "object",
"properties": {"query": {"type": "string", "description": "Text to search for"}, "limit": {"type":
"integer", "description": "Number of results"}}, "required": ["query"]}}
{"name": "calculate", "description": "Value of an expression", "parameters": {"type": "object",
"properties": {"expression": {"type": "string"}}, "required": ["expression"], 
"additionalProperties": false}}
<tool_result>{"temperature": 21, "unit": "celsius"}</tool_result>
< invoke name="get_weather"> < parameter name="city" string="true"> < parameter name="days"
string="false"> </ parameter> </ invoke> </ calls>

It was a bright morning and the small boat left the harbour before the others. The wind came from
the west, the water was cold, and nobody on board said a word until the island was in sight. There
they found what they had been looking for: an old house with a red door, a well, and a garden in
which someone had planted beans. "We should stay here," said the captain, "and wait for the ship."
So they made a fire, shared the bread, and told each other stories that were not all true. In the
evening it began to rain. The next day the ship was there, larger than any of them remembered, and
when its lamps were lit the whole bay could be seen from the house.

A model reads tokens and writes tokens. Its weights are kept in a few bits each, its attention looks
back through a window and through an index, and its experts share the work between two machines.
When the machines agree, the answer is right; when they do not, the rehearsal should say so first.
def add(left: int, right: int) -> int:
    return left + right
for item in range(10):
    print(item, item * item)
- first: install what is needed
- second: start the server and wait until it is ready
- third: ask a question, read the answer, stop the server
"""
