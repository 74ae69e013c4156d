import numpy as np, torch, pytest
from regard import *
import regard
@pytest.mark.parametrize("f",[lambda: window(np.int64(3)), lambda: alibi(np.int64(6)), lambda: softargmax(torch.zeros(3),np.float32(.5)), lambda: softcap(np.float32(2)), lambda: torch.ones(5,5,dtype=torch.bool)&causal(), lambda: None & causal(), lambda: 3 | causal(), lambda: softargmax(torch.zeros(3),np.float64(.5))])
def test_a(f): print(f())
