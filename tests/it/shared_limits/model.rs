//! The bucket of `tokens.lua` in plain numbers, in millionths of a token and microseconds.

/// What a proxy asks.
#[derive(Clone, Copy, Default, Debug)]
#[allow(missing_docs)] // named as in the script
pub struct Ask {
    pub rate: u64,
    pub burst: u64,
    pub back: u64,
    pub owed: u64,
    pub apart: u64,
    pub apart_debt: u64,
    pub needs: u64,
    pub smallest: u64,
    pub held: u64,
    pub more: u64,
    pub proxies: u64,
}

/// See the module.
#[derive(Clone, Default, Debug)]
pub struct Model(Option<(i128, u64, u64, u64)>);

const MILLION: i128 = 1_000_000;

impl Model {
    /// The level at a time.
    pub fn level(&self, now: u64, burst: u64) -> i128 {
        let full = i128::from(burst) * MILLION;
        let Some((level, at, rate, old_burst)) = self.0 else { return full };
        let refilled = level + i128::from(rate) * i128::from(now.saturating_sub(at));
        refilled.min(i128::from(old_burst) * MILLION).min(full)
    }

    /// Grants whole tokens, and tells the level afterwards.
    pub fn ask(&mut self, now: u64, ask: &Ask) -> (u64, i128) {
        let full = i128::from(ask.burst) * MILLION;
        let mut level = self.level(now, ask.burst);
        level = (level + i128::from(ask.back) * MILLION).min(full);
        let floor = -i128::from(ask.apart_debt) * MILLION;
        if level > floor {
            level = (level - i128::from(ask.apart) * MILLION).max(floor);
        }
        let deepest = (i128::from(ask.burst.min(1)) - i128::from(ask.rate) * 60).min(0) * MILLION;
        if ask.owed > 0 && level > deepest {
            level = (level - i128::from(ask.owed) * MILLION).max(deepest);
        }
        let mut granted = 0;
        if ask.rate > 0 && ask.burst > 0 {
            let whole = u64::try_from(level.div_euclid(MILLION)).unwrap_or(0);
            let share = ask.more.min(whole / ask.proxies);
            let enough =
                level + i128::from(ask.held) * MILLION >= i128::from(ask.smallest.min(ask.burst)) * MILLION;
            if ask.smallest == 0 {
                granted = share;
            } else if enough {
                let liked = whole.min(ask.needs.saturating_sub(ask.held).max(share));
                granted = liked.max(ask.smallest.saturating_sub(ask.held));
            }
        }
        level -= i128::from(granted) * MILLION;
        let at = self.0.map_or(now, |(_, at, ..)| at.max(now));
        self.0 = Some((level, at, ask.rate, ask.burst));
        (granted, level)
    }
}
