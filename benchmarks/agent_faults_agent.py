"""An agent whose tools may hang for ever, and whose client may vanish.

It uses the standard library alone.
"""

import hashlib
import json
import os
import socket
import time
import urllib.request
from urllib.parse import urlsplit


def ask(base_url, api_key, messages):
    """Ids and text of an answer."""
    body = {"messages": messages, "max_tokens": 12, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["token_ids"], choice["message"]["content"]


def vanish(base_url, api_key, messages):
    """Asks and is gone before the answer."""
    place = urlsplit(f"{base_url}/chat/completions")
    body = json.dumps({"messages": messages}).encode()
    head = (
        f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(head.encode() + body)


def play(task, *, base_url, api_key, model, notes, hang=0.0, gone=0.0):
    """Two turns around a tool; the reward is the share of the letter a in what the model wrote.

    Args:
        task: with its question.
        base_url: of the episode.
        api_key: likewise.
        model: its name.
        notes: file to which each episode that ends writes what it was answered and earned.
        hang: share of the episodes whose tool never returns.
        gone: share of those whose client vanishes.
    """
    name = base_url.split("/")[-2]
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
    messages = [{"role": "user", "content": task["question"]}]
    first, text = ask(base_url, api_key, messages)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    if draw < hang:
        while True:
            time.sleep(3600)
    if draw < hang + gone:
        vanish(base_url, api_key, messages)
        while True:
            time.sleep(3600)
    second, more = ask(base_url, api_key, messages)
    reward = (text + more).count("a") / max(len(text + more), 1)
    line = json.dumps({"task": task["id"], "ids": [first, second], "reward": reward}) + "\n"
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())  # at once: others write too
    os.close(file)
    return reward
