import sys, time
import cupy
name,batch,limit=sys.argv[1],int(sys.argv[2]),float(sys.argv[3]); sys.argv=['x']
import benchmarks.device as D
from service.tensor.cuda import linear as L
bench=D.Bench.make(D.MODELS[name],2048,256*16+1)
c=bench.config
base=L.warpgroup_variant
shapes={'qkv':((c.heads+2*c.kv_heads)*c.head_dim,c.dim,4),'o':(c.dim,c.heads*c.head_dim,4),'gate_up':(2*c.ffn,c.dim,1),'down':(c.dim,c.ffn,4),'head':(c.vocab_size,c.dim,1)}
names={v:k for k,v in shapes.items()}
def step():
    return bench.microseconds(bench.captured(bench.decode_step(batch,192)),10)
chosen={k:base(batch,*v) for k,v in shapes.items()}
L.warpgroup_variant=lambda rows,o,k,q: chosen[names[o,k,q]]
best=step(); print('start',best,chosen,flush=True)
t0=time.time()
widths=[base(batch,*shapes['gate_up'])[1]]+([128,256,64] if batch>64 else [])
for sweep in range(2):
    for k in ('gate_up','down','qkv','o','head'):
        for g in (1,2):
            for w in dict.fromkeys(widths):
                for s in (3,4,5,6,7,8,10,11,12,14,16):
                    if (g*64+w)*128*s>222*1024 or time.time()-t0>limit: continue
                    if sweep==1 and (g,w)!=chosen[k][:2]: continue
                    old=chosen[k]
                    if (g,w,s)==old: continue
                    chosen[k]=(g,w,s)
                    try: now=step()
                    except Exception as e: print('fail',k,(g,w,s),str(e)[:60]); chosen[k]=old; continue
                    if now<best-0.5: best=now
                    else: chosen[k]=old
        print(name,batch,k,round(best,1),chosen,round(time.time()-t0),flush=True)
