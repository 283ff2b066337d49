"""Small files in the schemas of published benchmarks, and the tasks that they become."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq

CONTEXT = [["Emma (novel)", ["Emma is a novel.", " It is by Jane Austen."]]]
TRIVIA = {
    "Domain": "unfiltered-web",
    "Data": [
        {
            "Answer": {
                "Aliases": ["Sunset Blvd", "Sunset Boulevard"],
                "NormalizedAliases": ["sunset blvd", "sunset boulevard"],
                "Value": "Sunset Boulevard",
            },
            "Question": "Which Lloyd Webber musical premiered in the US on 10th December 1993?",
            "QuestionId": "tc_33",
            "SearchResults": [{"Rank": 0, "Title": "x", "Url": "u", "Filename": "f.txt"}],
        },
        {"Question": "Without?", "QuestionId": "tc_34", "QuestionSource": "u"},
    ],
}
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes).\n\nWhat is 6*7?\n\n"
)
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": DAPO_PROMPT}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
AIME = {**DAPO, "data_source": "math_dapo", "extra_info": {"index": 0, "raw_problem": "6*7?"}}
HOTPOT = {
    "_id": "5a7a06935542990198eaf050",
    "answer": "Arthur's Magazine",
    "question": "Which magazine was started first?",
    "supporting_facts": [["Arthur's Magazine", 0]],
    "context": CONTEXT,
    "type": "comparison",
    "level": "medium",
}
MUSIQUE = {
    "id": "2hop__482757_12019",
    "paragraphs": [{"idx": 0, "title": "t", "paragraph_text": "x", "is_supporting": True}],
    "question": "When was the institute that owned The Collegian founded?",
    "question_decomposition": [{"id": 482757, "question": "q", "answer": "a"}],
    "answer": "1960",
    "answer_aliases": ["in 1960"],
    "answerable": True,
}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def array(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def table(path, *rows, **settings):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), **settings)
        writer.writeheader()
        writer.writerows(rows)
    return path


def parquet(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


POPQA = {
    "id": 4222362, "subj": "George Rankin", "prop": "occupation", "obj": "politician",
    "subj_id": 1850297, "s_aliases": '["George James Rankin"]', "s_pop": 142,
    "question": "What is George Rankin's occupation?",
    "possible_answers": '["politician", "political leader"]',
}  # fmt: skip
MATH = {
    "problem": "Evaluate $i^5$.", "solution": "It is $\\boxed{i}$.", "answer": "i",
    "subject": "Precalculus", "level": 1, "unique_id": "test/precalculus/807.json",
}  # fmt: skip
GSM8K = {"question": "How many?", "answer": "He has 1+1 = <<1+1=2>>2.\nSo 1,072.\n#### 1,072"}
FLASH_RAG = {"id": "dev_0", "question": "who wrote emma", "golden_answers": ["Jane Austen"]}
CASES = {
    "nq": [
        (lines, "NQ-open.dev.jsonl", {"question": "who wrote emma", "answer": ["Jane Austen"]},
         {"id": "nq_0", "question": "who wrote emma", "answers": ["Jane Austen"]}),
        (lines, "dev.jsonl", FLASH_RAG | {"metadata": {"context": "long"}},
         {"id": "nq_dev_0", "answers": ["Jane Austen"]}),
    ],
    "triviaqa": [
        (array, "unfiltered-web-train.json", TRIVIA,
         {"id": "triviaqa_tc_33", "answers": ["Sunset Boulevard", "Sunset Blvd"]}),
        (parquet, "train.parquet",
         {"question": "q?", "question_id": "tc_1", "answer": {"value": "a", "aliases": ["b"]}},
         {"id": "triviaqa_tc_1", "answers": ["a", "b"]}),
    ],
    "popqa": [
        (lambda path, row: table(path, row, delimiter="\t"), "popQA.tsv", POPQA,
         {"id": "popqa_4222362", "answers": ["politician", "political leader"],
          "metadata": {"prop": "occupation", "s_pop": "142"}}),
    ],
    "hotpotqa": [
        (array, "hotpot_train_v1.1.json", [HOTPOT],
         {"id": "hotpotqa_5a7a06935542990198eaf050", "answers": ["Arthur's Magazine"],
          "metadata": {"type": "comparison", "level": "medium"}}),
    ],
    "2wiki": [
        (array, "train.json",
         [{**HOTPOT, "type": "compositional", "level": None, "evidences": [["a", "b", "c"]]}],
         {"id": "2wiki_5a7a06935542990198eaf050", "metadata": {"type": "compositional"}}),
    ],
    "musique": [
        (lines, "musique_ans_v1.0_train.jsonl", MUSIQUE,
         {"id": "musique_2hop__482757_12019", "answers": ["1960", "in 1960"],
          "metadata": {"hops": 2}}),
    ],
    "bamboogle": [
        (table, "Bamboogle.csv", {"Question": "Who was president?", "Answer": "James K. Polk"},
         {"id": "bamboogle_0", "answers": ["James K. Polk"]}),
    ],
    "aime": [
        (parquet, "aime24.parquet",
         {"id": 60, "problem": "Find x.", "solution": "s", "answer": "204", "url": "u",
          "year": "2024"},
         {"id": "aime_60", "question": "Find x.", "answers": ["204"],
          "metadata": {"year": "2024"}}),
        (lines, "aime_2024.jsonl",
         {"ID": "2024-II-4", "Problem": "p", "Solution": "s", "Answer": 33},
         {"id": "aime_2024-II-4", "answers": ["33"]}),
        (parquet, "aime-2024.parquet", AIME,
         {"id": "aime_0", "messages": AIME["prompt"], "answers": ["42"]}),
    ],
    "math500": [
        (lines, "test.jsonl", MATH,
         {"id": "math500_test/precalculus/807.json", "question": "Evaluate $i^5$.",
          "answers": ["i"], "metadata": {"subject": "Precalculus", "level": 1}}),
    ],
    "gsm8k": [
        (lines, "train.jsonl", GSM8K, {"id": "gsm8k_0", "question": "How many?",
                                       "answers": ["1072"]}),
    ],
    "dapo": [
        (parquet, "dapo-math-17k.parquet", DAPO,
         {"id": "dapo_9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079", "messages": DAPO["prompt"],
          "answers": ["42"]}),
    ],
    "enigmata": [
        (lines, "eval.jsonl",
         {"prompt": "Solve.", "answer": "ABC", "task_name": "crypto_kk", "difficulty": "easy",
          "meta": '{"id": 1}'},
         {"id": "enigmata_0", "question": "Solve.", "answers": ["ABC"],
          "metadata": {"task_name": "crypto_kk", "difficulty": "easy", "meta": '{"id": 1}'}}),
    ],
}  # fmt: skip
