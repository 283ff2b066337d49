"""A server that stands in for the Hugging Face Hub, and its client's settings."""

import contextlib
import hashlib
import re

from huggingface_hub import constants

from tests.servers import Reply, Server


class Hub(Server):
    """Repositories of models and data sets, by `models/org/name` or `datasets/org/name`.

    Attributes:
        commits: List of commits of each repository, oldest first; a commit maps paths to contents.
        gated: Repositories that require a token.
        cuts: Numbers of bytes after which the next downloads of a path are cut.
        downloads: Paths of downloaded files, with the first byte of each request.
    """

    def __init__(self):
        super().__init__(self._answer)
        self.commits, self.gated, self.cuts, self.downloads = {}, set(), {}, []

    def push(self, repo, files):
        """Add a commit to a repository; return its id."""
        self.commits.setdefault(repo, []).append(files)
        return self._commit_id(repo, len(self.commits[repo]) - 1)

    def _commit_id(self, repo, index):
        return hashlib.sha1(f"{repo} {index}".encode()).hexdigest()

    def _find(self, repo, revision):
        """Return the id and files of a revision: `main`, `v1` for the first commit, or an id."""
        ids = [self._commit_id(repo, index) for index in range(len(self.commits[repo]))]
        names = {"main": ids[-1], **{f"v{i}": id for i, id in enumerate(ids, 1)}}
        id = names.get(revision, revision)
        return (id, self.commits[repo][ids.index(id)]) if id in ids else (None, None)

    def _answer(self, request):
        pattern = r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?"
        if match := re.fullmatch(pattern, request.path):
            repo, kind, revision = match[1], match[2] or "revision", match[3] or "main"
            path = None
        else:
            match = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.path)
            repo, kind, revision = f"{match[1] or 'models/'}{match[2]}", "file", match[3]
            path = match[4]
        if repo not in self.commits:
            return self._error(404, "RepoNotFound")
        commit, files = self._find(repo, revision)
        if commit is None:
            return self._error(404, "RevisionNotFound")
        if kind == "revision":
            return {"id": repo.partition("/")[2], "sha": commit, "siblings": []}
        if kind == "tree":
            return [
                {"type": "file", "path": path, "size": len(content), "oid": self._blob(content)}
                for path, content in files.items()
            ]
        if repo in self.gated and "authorization" not in request.headers:
            return self._error(403, "GatedRepo")
        if path not in files:
            return self._error(404, "EntryNotFound")
        content = files[path]
        headers = {"ETag": f'"{self._blob(content)}"', "X-Repo-Commit": commit}
        headers["Accept-Ranges"] = "bytes"
        if request.method == "HEAD":
            return Reply(content, 200, headers)
        start = int(re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", "bytes=0-"))[1])
        self.downloads.append((path, start))
        cuts = self.cuts.get(path)
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return Reply(content[start:], status, headers, cut=cuts.pop(0) if cuts else None)

    @staticmethod
    def _blob(content):
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @staticmethod
    def _error(status, code):
        return Reply({"error": code}, status, {"X-Error-Code": code})


@contextlib.contextmanager
def serve_hub(cache, monkeypatch):
    """Yield a hub that this process and its children use, with a cache folder."""
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_ENDPOINT", server.url)  # for processes
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    try:
        yield server
    finally:
        server.close()
