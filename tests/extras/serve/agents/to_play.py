"""Agents for tests, which use the standard library and note what they receive."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib


def post(url, body, key, **headers):
    """Return status and JSON of a response."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(base_url, key, messages, **fields):
    body = {"model": "any", "messages": messages, "max_tokens": 6, "return_token_ids": True}
    status, answer = post(f"{base_url}/chat/completions", body | fields, key)
    if status != 200:
        raise ValueError(answer["error"]["message"])
    return answer


def user(text):
    return {"role": "user", "content": text}


def assistant(answer):
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def note(folder, task, base_url, answers):
    """Write the ids of each completion to a file with the episode's name."""
    name = base_url.split("/")[-2]
    seen = [(answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) for answer in answers]
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump({"task": task["id"], "seen": seen}, file)


def converses(task, *, base_url, api_key, model, folder, turns=3, long=""):
    """Have a conversation; the last text sets the reward.

    If a task is `long`, it has long answers, and the others first wait for a file.
    """
    is_long = task["id"] == long
    while long and not is_long and not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.02)
    messages, answers = [user(task["question"])], []
    for turn in range(turns):
        answers.append(ask(base_url, api_key, messages, max_tokens=300 if is_long else 6))
        messages += [assistant(answers[-1]), user(f"more {turn}")]
    note(folder, task, base_url, answers)
    text = answers[-1]["choices"][0]["message"]["content"]
    return {"reward": len(text) / 10, "is_correct": len(text) % 2 == 1, "final_answer": text}


def wanders(task, *, base_url, api_key, model, folder):
    """Continue, fork, cut the history, and ask something else."""
    start = [user(task["question"])]
    first = ask(base_url, api_key, start)
    prefix = [*start, assistant(first)]
    left = ask(base_url, api_key, [*prefix, user("left")])
    right = ask(base_url, api_key, [*prefix, user("right")])
    longer = ask(base_url, api_key, [*prefix, user("left"), assistant(left), user("on")])
    other = ask(base_url, api_key, [user("something else")])
    cut = ask(base_url, api_key, [user(task["question"]), user("cut")])
    note(folder, task, base_url, [first, left, right, longer, other, cut])
    return 1.0


def spreads(task, *, base_url, api_key, model, folder, count=4):
    """Send concurrent requests; the final answer lists their errors."""
    answers, errors = [], []

    def ask_one(number):
        messages = [user(f"{task['question']} {number}")]
        try:
            answers.append(ask(base_url, api_key, messages, max_tokens=60))
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask_one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    note(folder, task, base_url, answers)
    return {"reward": 1.0, "final_answer": "; ".join(errors)}


async def waits(task, *, base_url, api_key, model, folder):
    """Ask once; a slow task then waits for a file and asks again."""
    question = user(task["question"])
    answers = [await asyncio.to_thread(ask, base_url, api_key, [question])]
    if task["metadata"].get("slow"):
        while not os.path.exists(os.path.join(folder, "go")):
            await asyncio.sleep(0.02)
        messages = [question, assistant(answers[0]), user("more")]
        answers.append(await asyncio.to_thread(ask, base_url, api_key, messages))
    note(folder, task, base_url, answers)
    return 0.5


def loses(task, *, base_url, api_key, model, folder, says_so):
    """Lose responses before or after they are sent, and ask again."""
    messages, answers = [user(task["question"])], []
    for turn in range(4):
        if turn % 2:
            abandon(base_url, api_key, messages, waits=says_so and turn == 1)
        headers = {"x-stainless-retry-count": "1"} if says_so and turn % 2 else {}
        body = {"messages": messages, "max_tokens": 6, "return_token_ids": True}
        status, answer = post(f"{base_url}/chat/completions", body, api_key, **headers)
        assert status == 200, answer
        answers.append(answer)
        messages += [assistant(answer), user(f"more {turn}")]
    note(folder, task, base_url, answers)
    return 1


def abandon(base_url, api_key, messages, *, waits):
    """Send a request whose response nobody reads."""
    url = urllib.parse.urlsplit(f"{base_url}/chat/completions")
    body = json.dumps({"messages": messages, "max_tokens": 6, "return_token_ids": True})
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n"
    head += f"Authorization: Bearer {api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        # What may be followed by more leaves the machine with the end of the connection, which then
        # is not later than the answer on a busy one.
        connection.sendall((head + body).encode(), 0 if waits else socket.MSG_MORE)
        if waits:
            connection.recv(1, socket.MSG_PEEK)


def learns(task, *, base_url, api_key, model, folder, slow=(), slow_s=1.5):
    """Take two turns, of which a hash is the reward. The tasks in `slow` take some time."""
    question = user(task["question"])
    first = ask(base_url, api_key, [question])
    if task["id"] in slow:
        time.sleep(slow_s)
    second = ask(base_url, api_key, [question, assistant(first), user("more")])
    note(folder, task, base_url, [first, second])
    return zlib.crc32(repr(second["choices"][0]["token_ids"]).encode()) % 2


def fails(task, *, base_url, api_key, model):
    """End in one of many wrong ways, named by the task."""
    name = task["id"]
    if name == "silent":
        return 1.0
    answer = ask(base_url, api_key, [user("?")])
    if name == "raises":
        raise RuntimeError("the tool is gone")
    if name == "hangs":
        time.sleep(3600)
    rewards = {"nothing": None, "text": "well done", "bool": True, "nan": float("nan")}
    return rewards.get(name, len(answer["choices"]))


def main():
    """Play an episode as a program. The words of the task's id name its actions."""
    task = json.load(sys.stdin)
    key, base_url = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]
    reward, words = task["reward"], task["id"].split("-")
    if "ends" in words:
        print("I cannot")
        sys.exit(4)
    ask(base_url, key, [user(task["question"])])
    if folder := os.environ.get("NOTES"):
        with open(os.path.join(folder, task["id"]), "w", encoding="utf-8") as file:
            json.dump(reward, file)
    if "cheats" in words:
        cheat = [sys.executable, os.path.join(os.path.dirname(__file__), "cheat.py")]
        subprocess.run(cheat, check=True)
    if "posts" in words:
        assert post(reward["url"], {"reward": 0.25}, reward["key"]) == (200, {"status": "ok"})
    if "again" in words:
        assert post(reward["url"], {"reward": 0.25}, reward["key"])[0] == 200
    if "otherwise" in words:
        assert post(reward["url"], {"reward": 1}, reward["key"])[0] == 409
    if "writes" in words:
        with open(reward["file"], "w", encoding="utf-8") as file:
            json.dump({"reward": 0.75, "is_abstention": True}, file)
    if "fails" in words:
        sys.exit(5)


if __name__ == "__main__":
    main()
