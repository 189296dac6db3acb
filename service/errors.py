"""All exceptions of the project, as one tree. Each is raised at the edge of the layer it is named for.

PhotonError
├── SettingsError           an option: its name, the value, what is allowed
├── ModelError              a checkpoint: file, tensor, found and wanted
│   ├── UnsupportedModelError   a kind of model that is refused by name
│   ├── DownloadError           a model that can't be fetched: offline, unknown, denied
│   └── MemoryBudgetError       what would not fit, with the sum
├── KernelError             an argument of a tensor op, or a kernel that does not compile
├── RequestError            what a client sent: field, value, remedy (HTTP 400)
│   ├── ContextLengthError      a prompt longer than the context
│   └── UnsupportedFieldError   a field or value that would change the answer and is not done here
├── ModelNotFoundError      a model name that is not served (HTTP 404)
├── OverloadedError         the queue is full, or the server is loading or draining (HTTP 503)
├── GenerationError         a request that failed while it ran; others are unaffected (HTTP 500)
│   └── DeadlineError           a request that was not done within its timeout (HTTP 504)
└── EngineDeadError         the engine can't run any request any more (HTTP 503; /livez fails)
"""


class PhotonError(Exception):
    """Base of every exception that this project raises on purpose."""


class SettingsError(PhotonError):
    """An option has a value that can't be used. The message names option, value and remedy."""


class ModelError(PhotonError):
    """A checkpoint can't be used. The message names file, tensor, found and wanted where they apply."""


class UnsupportedModelError(ModelError):
    """A kind of model that this project does not run, refused by name."""


class DownloadError(ModelError):
    """A model could not be fetched. The message says what was tried and what to do."""


class MemoryBudgetError(ModelError):
    """Weights, KV cache and workspace do not fit. The message gives the sum and the remedy."""


class KernelError(PhotonError):
    """A tensor op got an argument that breaks its contract, or a kernel does not compile."""


class RequestError(PhotonError):
    """A client's request can't be served as it is. `field` is a JSON path such as `messages[0].content`."""

    code: str | None = None

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code if code is not None else type(self).code


class ContextLengthError(RequestError):
    """The prompt is longer than the model's context, or than the KV cache can ever hold."""

    code = "context_length_exceeded"


class UnsupportedFieldError(RequestError):
    """A field that would change the answer and is not offered."""

    code = "unsupported_parameter"


class ModelNotFoundError(PhotonError):
    """The request names a model that is not served here."""


class OverloadedError(PhotonError):
    """Nothing can be admitted now. `retry_after_seconds` is when trying again makes sense."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class GenerationError(PhotonError):
    """One request failed while it ran; it is over, its blocks are free, others go on."""


class DeadlineError(GenerationError):
    """One request was not done within its timeout, queueing included."""


class EngineDeadError(PhotonError):
    """The engine has stopped for good; the process should be restarted."""
