"""Running vLLM servers as engines. Read `engine`, then `facts` and `client`."""
