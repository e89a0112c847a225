"""The same task as ``experiment=arithmetic_tools``, by an agent that calls the policy over HTTP."""

import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

sys.path.append(str(Path(__file__).parent))
from calculator import multiply

CLIENT = AsyncOpenAI(api_key="replaced below", max_retries=0)

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first factor."},
                "b": {"type": "integer", "description": "The second factor."},
            },
            "required": ["a", "b"],
        },
    },
}


async def agent(record, base_url, api_key):
    """Let the policy call the calculator until it answers; the verifier then reads what it wrote."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = list(record.messages)
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls[:1]:
            try:
                result = json.dumps(multiply(**json.loads(call.function.arguments)))
            except (TypeError, ValueError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
