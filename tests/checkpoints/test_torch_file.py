"""Files of torch.save read without torch: what torch writes comes back, and nothing in a file is ever run."""

import io
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from molora_jax.checkpoints import torch_file
from molora_jax.config import UserError

NUMPY = np.arange(6, dtype=np.float32)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def storage(kind="FloatStorage", key="0", size=6, module="torch") -> bytes:
    return b"(" + text("storage") + f"c{module}\n{kind}\n".encode() + text(key) + text("cpu") + number(size) + b"tQ"


def tensor(size=(2, 3), stride=(3, 1), offset=0, **kwargs) -> bytes:
    """The instructions that make a tensor, as torch writes them."""
    shape = lambda values: b"(" + b"".join(map(number, values)) + b"t"
    args = b"(" + storage(**kwargs) + number(offset) + shape(size) + shape(stride) + b"\x89" + b"ccollections\n"
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + args + b"OrderedDict\n)Rt" + b"R"


def write(tmp_path, program: bytes, data: bytes = NUMPY.tobytes(), **files: bytes):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + program + b".")
        archive.writestr("x/data/0", data)
        for name, content in files.items():
            archive.writestr(f"x/{name}", content)
    return path


@pytest.mark.parametrize(
    ("kwargs", "want"),
    [
        ({}, NUMPY.reshape(2, 3)),
        (dict(size=(3, 2), stride=(1, 3)), NUMPY.reshape(2, 3).T),
        (dict(size=(2,), stride=(2,), offset=1), NUMPY[[1, 3]]),
        (dict(size=(), stride=()), NUMPY[0]),
        (dict(size=(0, 3), stride=(3, 1)), NUMPY[:0].reshape(0, 3)),
        (dict(size=(2,), stride=(0,), offset=5), NUMPY[[5, 5]]),
        (dict(kind="BFloat16Storage", size=(6,), stride=(1,)), NUMPY.view(ml_dtypes.bfloat16)[:6]),
        (dict(kind="LongStorage", size=(3,), stride=(1,), **{"key": "0"}), None),
    ],
)
def test_tensors_and_their_views(tmp_path, kwargs, want):
    if want is None:
        with pytest.raises(UserError, match="damaged"):  # six integers do not fit into the bytes of six floats
            torch_file.load(write(tmp_path, tensor(**kwargs)))
        return
    got = torch_file.load(write(tmp_path, tensor(**kwargs)))
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got, want)
    assert got.flags.owndata or got.base is None


def test_plain_data(tmp_path):
    program = b"}(" + text("a") + b"]q\x01(K\x05M\x00\x01\x8a\x01\xffNeu" + b"(" + text("b") + b"h\x01u"
    program += text("c") + b"G" + struct.pack(">d", 0.25) + b"\x88\x86\x85s"
    got = torch_file.load(write(tmp_path, program))
    assert got == {"a": [5, 256, -1, None], "b": [5, 256, -1, None], "c": ((0.25, True),)}


HOSTILE = {
    "call": (b"cos\nsystem\n" + text("touch x") + b"\x85R", "got a call of os.system"),
    "evaluation": (b"c__builtin__\neval\n" + text("1") + b"\x85R", "got a call of __builtin__.eval"),
    "protocol-4": (b"\x8c\x02os\x8c\x06system\x93" + text("x") + b"\x85R", "got a call of os.system"),
    "object": (b"ccollections\nOrderedDict\n)\x81", "got the instruction"),
    "instance": (b"(ios\nsystem\n", "got the instruction"),
    "attributes": (b"]}b", "got the instruction"),
    "extension": (b"\x82\x01", "got the instruction"),
    "storage": (storage(kind="UntypedStorage"), "got a storage torch.UntypedStorage"),
    "module": (storage(module="os"), "got a storage os.FloatStorage"),
    "beyond": (tensor(offset=1), "expected one that fits"),
    "before": (tensor(offset=-1), "expected one that fits"),
    "backwards": (tensor(stride=(-3, 1), offset=3), "expected one that fits"),
    "huge": (tensor(size=(10**6, 10**6), stride=(0, 0)), "expected one that fits"),
    "sizes": (tensor(size=(2,)), "damaged"),
    "short": (b"X\xff\x00\x00\x00abc", "damaged"),
    "empty": (b"", "damaged"),
    "leftover": (b"NN", "damaged"),
    "memo": (b"h\x07", "damaged"),
    "key": (storage(key="../../1") + tensor(key="7"), "damaged"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_anything_but_data_is_refused(tmp_path, how):
    program, line = HOSTILE[how]
    with pytest.raises(UserError, match=line) as caught:
        torch_file.load(write(tmp_path, program))
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="big-endian"):
        torch_file.load(write(tmp_path, b"N", byteorder=b"big"))
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(UserError, match=r"torch 1\.6"):
        torch_file.load(tmp_path / "old.pt")
    with pytest.raises(UserError, match=r"torch 1\.6"):
        torch_file.load(tmp_path / "none.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(UserError, match=r"zip without data\.pkl"):
        torch_file.load(tmp_path / "other.pt")


def test_what_torch_writes(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'molora_jax[bench]'")
    base = torch.randn(4, 6)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.GRU(2, 2))
    tensors = dict(
        plain=base,
        view=base[1:, ::2].T,
        shared=base[0],
        half=base.half(),
        brain=base.bfloat16(),
        wide=base.double(),
        ids=torch.arange(5),
        mask=base > 0,
        scalar=torch.tensor(1.5),
        none=torch.zeros(0, 3),
        parameter=torch.nn.Parameter(base),
    )
    data = dict(epoch=2, loss=0.125, names=["a", "b"], flags=(True, None), big=2**40, state=module.state_dict())
    torch.save(data | dict(tensors=tensors), tmp_path / "x.pt")
    got = torch_file.load(tmp_path / "x.pt")
    assert {key: got[key] for key in list(data)[:5]} == dict(list(data.items())[:5])
    for name, value in (*tensors.items(), *data["state"].items()):
        found = (got["tensors"] | got["state"])[name]
        want = value.detach().float().numpy() if value.dtype == torch.bfloat16 else value.detach().numpy()
        np.testing.assert_array_equal(found.astype(want.dtype), want)
        assert found.dtype.name == str(value.dtype).removeprefix("torch.")
    buffer = io.BytesIO()
    torch.save(module, buffer)  # a whole module names its class, which would have to be called
    (tmp_path / "module.pt").write_bytes(buffer.getvalue())
    with pytest.raises(UserError, match="expected data and tensors alone"):
        torch_file.load(tmp_path / "module.pt")
